"""Model-written code in a separate, limited process, without network, files or access to other processes."""

from lockstep.rl.grading.sandbox.run import Result, SandboxError, SandboxLimits, missing_protections, run_code

__all__ = ["Result", "SandboxError", "SandboxLimits", "missing_protections", "run_code"]
