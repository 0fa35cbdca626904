"""Test processes share the cores: an example that was slow is no fault of what is tested."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared cores")
