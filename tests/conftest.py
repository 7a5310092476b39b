"""Settings for every test: a slow machine must not fail a property by the clock."""

from hypothesis import settings

settings.register_profile("shardbox", deadline=None)
settings.load_profile("shardbox")
