"""One script per claim: `python -m benchmarks.promotion`, `.overhead`, `.bursts`; `load` is for Locust."""

import os
import sys

# Ray sends its token to a cluster whose address is given only when it is told to, and reads this when it is imported.
# Tests that import these modules have a Ray of their own, which must not be told.
if "pytest" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
