"""What concerns the API server, whatever the device."""
