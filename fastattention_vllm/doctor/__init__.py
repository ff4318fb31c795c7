"""What this machine and this plugin make of each other: `fastattention doctor`. No vLLM import."""
