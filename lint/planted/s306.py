import tempfile

tempfile.mktemp()
