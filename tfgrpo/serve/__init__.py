"""The gateway: an OpenAI-compatible endpoint in front of any models.

An agent changes its base URL and gets the learnt library in its prompt, exact money caps, feedback
on response ids and a library that goes on learning from it.
"""
