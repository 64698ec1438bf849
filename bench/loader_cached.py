"""The checkpoint of the loader benchmark once more, in a node cache, and served for who asks its version."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from loadstone.bench.loader_inputs import Inputs
from loadstone.fileserver import FileServer
from loadstone.loader.checkpoint import open_checkpoint


@contextmanager
def in_node_cache(inputs: Inputs) -> Iterator[None]:
    """Have all of the checkpoint of four shards in ``inputs.cache``, as it comes from ``inputs.url``."""
    shutil.rmtree(inputs.cache, ignore_errors=True)  # of a run that was killed
    with FileServer(inputs.sharded) as server:
        print(f"filling the node cache {inputs.cache}", file=sys.stderr, flush=True)
        inputs.url_file.write_text(server.url)
        try:
            with open_checkpoint(server.url, cache=inputs.cache) as checkpoint:
                checkpoint.prefetch().wait()
                checkpoint.source.settle()
            yield
        finally:
            shutil.rmtree(inputs.cache, ignore_errors=True)
