"""The wire contract as Python: messages generated from proto/torchft.proto, and the names of its services."""
