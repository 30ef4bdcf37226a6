"""The verifier that runs an answer's code: finding it, the cells it runs in, and the checks."""

from tfgrpo.verifiers.code.answer_code import code_in
from tfgrpo.verifiers.code.verifier import Code

__all__ = ["Code", "code_in"]
