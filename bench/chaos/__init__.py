"""What clients, operators and broken parts may do to a server, and what must hold afterwards."""
