"""The viewer: a local web application over run directories (`hermes-rl view`).

| file | what |
|---|---|
| `index` | the light columns of all attempts of a run, kept current; whole rows from disk |
| `folder` | the runs below a folder and their state; what a page needs of one run |
| `app` | the web application: routes, access, headers |
| `compare` | what differs between two runs, or two attempts |
| `static` | the page: plain HTML, CSS and JavaScript |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.viewer.app import encode_answer, serve
    from hermes_rl.viewer.compare import diff_attempts, diff_runs
    from hermes_rl.viewer.folder import RunFolder
    from hermes_rl.viewer.index import RunIndex
else:
    __getattr__, __dir__ = attach(__name__)
