"""PipeSwitch's own HTTP interface: ``/api`` and the web page."""
