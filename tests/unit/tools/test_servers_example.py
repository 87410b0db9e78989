"""The wait for servers in examples/servers/run.sh: its own function, with processes that print progress."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = (Path(__file__).parents[3] / "examples" / "servers" / "run.sh").read_text()
AROUND = """
declare -A servers
addresses=. logs=. SILENCE=2
failed() { echo "FAILED: $*"; exit 1; }
%s
for name in one two; do
    (%s) >/dev/null 2>&1 &
    servers[$name]=$!
    touch $name.log
done
wait_for_servers one two
echo all answer
kill "${servers[@]}" 2>/dev/null
"""


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("for n in {1..9}; do echo loading >>$name.log; sleep 0.5; done; echo http://x >$name; sleep 9", "all answer"),
        ("sleep 9", "FAILED: server one has logged nothing for 2 s"), ("exit 1", "FAILED: server one exited before it was ready"),
    ],
)  # fmt: skip
def test_wait_for_servers_timeout_restarts_at_each_output(tmp_path, server, said):
    function = re.search(r"^wait_for_servers\(\) \{.*?^\}", SCRIPT, re.MULTILINE | re.DOTALL)[0]
    assert SCRIPT.index("start two\n    wait_for_servers one two\n") < SCRIPT.index("torchrun --nproc_per_node")
    ran = subprocess.run(["bash", "-euo", "pipefail", "-c", AROUND % (function, server)], cwd=tmp_path, capture_output=True, text=True,
                         timeout=60)  # fmt: skip
    assert said in ran.stdout, (ran.stdout, ran.stderr)
