"""No test cuts the power, so nothing waits until files are on the disk: each wait takes milliseconds.

Whoever imports this, and each process that it forks, does without. Tests of what is durable have an `fsync` of theirs.
"""

import os

os.fsync = lambda descriptor: None
