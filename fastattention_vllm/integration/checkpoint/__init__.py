"""What a model's folder says, checked before any process is started."""
