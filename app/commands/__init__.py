"""What runs beside the server, each as `python -m app NAME`."""
