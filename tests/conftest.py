"""What all tests share: property tests are judged by what they find, not by how fast a busy machine generates."""

from hypothesis import HealthCheck, settings

settings.register_profile("guidevane", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("guidevane")
