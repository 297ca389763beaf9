"""Conversations as data: their messages, the chat template that writes them, and which of their tokens are learned."""
