"""What PipeSwitch alone has over HTTP: ``/api`` and the page."""
