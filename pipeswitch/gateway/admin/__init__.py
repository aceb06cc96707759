"""PipeSwitch's own HTTP interface: ``/api`` and the page."""
