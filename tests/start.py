"""shardbox as `python shardbox.py` runs it, but from its cached bytecode, where it may be kept: to compile the module
takes 0.4 s of a core, and the tests start it thousands of times."""

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
sys.argv[0] = str(Path(sys.path[0], "shardbox.py"))
runpy.run_module("shardbox", run_name="__main__", alter_sys=True)
