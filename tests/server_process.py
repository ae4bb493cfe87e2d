"""Starts `fla_jax.serve` as a process."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import subprocess
import sys
import threading


@contextlib.contextmanager
def running(checkpoint, *options, **environment):
    """A server's process and its address; an error shows the end of its log.

    By default it compiles when requests come, and keeps no programs in the user's folders.
    """
    command = [sys.executable, "-u", "-m", "fla_jax.serve", str(checkpoint), "--port", "0"]
    command += ["--warm-up", "0", "--compilation-cache", "", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    log = collections.deque(maxlen=50)
    try:
        for line in process.stdout:
            log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            raise RuntimeError("".join(log))
        # nobody else reads it, and a full pipe would stop the server
        threading.Thread(target=lambda: log.extend(process.stdout), daemon=True).start()
        yield process, found[1]
    except BaseException:
        print("".join(log))
        raise
    finally:
        process.kill()
        process.wait()
