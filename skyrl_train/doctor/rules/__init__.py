"""Rules, by what they look at."""
