"""Client libraries as their users call them, against the real HTTP server. Extras `clients`, `litellm`."""
