import subprocess

subprocess.run(input(), shell=True)
