"""A kernel repository for demonstrations and benchmarks."""

import json

from .repository import Repository
from .site import Site

REPO_ID = "demo/scale"
VARIANT = "torch-universal"


def publish(site: Site, *, files: int, size: int = 1000, repo_id: str = REPO_ID) -> Repository:
    """Publish version 1 of a pure-Python kernel whose one build has so many files of about so many bytes."""
    name = repo_id.partition("/")[2]
    metadata = {
        "name": name,
        "id": f"_{name}_demo",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    content = {
        "__init__.py": b"def scale(x, factor):\n    return x * factor\n",
        "metadata.json": json.dumps(metadata).encode(),
    }
    for number in range(files - len(content)):
        line = f"VALUE_{number} = {number}\n".encode()
        content[f"part_{number:04}.py"] = line + b"#" * max(0, size - len(line) - 1) + b"\n"
    repository = site.kernel(repo_id)
    repository.commit({f"build/{VARIANT}/{path}": blob for path, blob in content.items()}, branch="v1")
    site.publisher(repo_id.partition("/")[0], trusted=True)
    return repository
