"""ASGI middlewares that keep a front end safe: who may call, how often, with how much, and what is logged of it."""
