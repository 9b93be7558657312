"""Times bench/sweep.py with constants of kernels/victims.py changed, as for planner-3 to planner-5:

  python variants.py CHECKOUT NAME=VALUE... -- --kernels=fused --sweeps=pool --pool_rows=64,258,2048 ...
"""

import sys

checkout, *rest = sys.argv[1:]
end = rest.index("--")
sys.path.insert(0, checkout)

from absl import app

from bench import sweep
from pallas_pool.kernels import victims

for assignment in rest[:end]:
    name, value = assignment.split("=")
    assert hasattr(victims, name), name
    setattr(victims, name, float(value) if "." in value else int(value))
sys.argv = ["bench/sweep.py", *rest[end + 1 :]]
sweep.define_flags()
app.run(sweep.main)
