"""Changes to the API server, for all devices."""
