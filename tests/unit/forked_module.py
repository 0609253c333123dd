"""The module that the tests of forks run: it shows how it was started, writes to a descriptor, or sleeps."""

from __future__ import annotations

import json
import os
import sys
import time

if __name__ == "__main__" and sys.argv[1] == "sleep":
    time.sleep(600)
elif __name__ == "__main__" and sys.argv[1] == "write":
    os.write(int(sys.argv[2]), b"written")
elif __name__ == "__main__":
    shown = {"arguments": sys.argv[1:], "environment": dict(os.environ), "session": os.getsid(0)}
    print(json.dumps(shown | {"was loaded": "torch" in sys.modules}))
    sys.exit(3)
