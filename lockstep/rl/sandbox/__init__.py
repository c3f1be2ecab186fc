"""Model-written code in a process of its own, without network, files, other processes or an end to its limits."""

from lockstep.rl.sandbox.run import Result, SandboxError, SandboxLimits, missing_protections, run_code

__all__ = ["Result", "SandboxError", "SandboxLimits", "missing_protections", "run_code"]
