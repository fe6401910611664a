"""How each server is spoken to: bodies of requests, and what the events of an answer mean."""
