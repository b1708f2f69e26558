"""`python -m thinwire`, which setup.cfg installs beside the sub-packages."""

import sys

from thinwire.launch.cli import main

sys.exit(main())
