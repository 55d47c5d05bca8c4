"""Load and soak tests against a running OpenAI-compatible server. Not part of the wheel, which it never imports.

Only `locustfile` imports locust, whose gevent patches the standard library: nothing else here may import either.
"""
