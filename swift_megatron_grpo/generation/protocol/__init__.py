"""The protocol between trainer and rollout server. Both import this folder, which needs torch, numpy and pydantic only.

api_key.py         where the API key is read from, and how it stays out of process lists
messages.py        HTTP routes, status codes and JSON messages
model_identity.py  values of config.json that must be equal on both ends
"""
