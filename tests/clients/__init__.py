"""Client libraries against the real HTTP server. Extras `clients`, `litellm`."""
