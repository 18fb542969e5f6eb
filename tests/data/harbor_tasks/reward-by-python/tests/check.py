import json
import pathlib

logs = pathlib.Path("/logs/verifier")
try:
    good = json.load(open("/app/out.json"))["total"] == 42
except (OSError, ValueError, KeyError, TypeError):
    good = False
(logs / "reward.txt").write_text(str(float(good)))
