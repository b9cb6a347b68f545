"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Time on a machine that others use as well says nothing of a test. In CI the same examples are drawn each time: a run
# fails for what was changed, while new examples are found where somebody looks at them.
settings.register_profile("project", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("project")
