"""DSPy 3.4.1 SIMBA: rules appended to the instruction, and demonstrations where `DEMOS` is set.

The program's own prompt is plain (instruction, demonstrations as turns, the question), as every
method's actor here; SIMBA's own prompts keep DSPy's format. Its last choice scores every candidate
on all its tasks and cannot be stopped, so it gets the half to learn from; batch and candidates are
small enough that a step and that choice fit the budget.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from common import Job, finish

BATCH = 8
CANDIDATES = 3


def main() -> None:
    job = Job.read()
    max_demos = int(os.environ.get("DEMOS", "0"))
    import dspy

    class Plain(dspy.ChatAdapter):
        """The question as it is; other signatures in DSPy's own form."""

        def _is_ours(self, signature: Any) -> bool:
            return set(signature.output_fields) == {"answer"}

        def format(self, signature: Any, demos: Any, inputs: Any) -> Any:
            if not self._is_ours(signature):
                return super().format(signature, demos, inputs)
            messages = [{"role": "system", "content": signature.instructions}]
            for demo in demos:
                messages.append({"role": "user", "content": str(demo["question"])})
                messages.append({"role": "assistant", "content": str(demo["answer"])})
            return [*messages, {"role": "user", "content": str(inputs["question"])}]

        def parse(self, signature: Any, completion: str) -> Any:
            if not self._is_ours(signature):
                return super().parse(signature, completion)
            return {"answer": completion.strip()}

    class Failures(logging.Handler):
        count = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.count += "Strategy failed" in record.getMessage()

    failures = Failures()
    logging.getLogger("dspy.teleprompt.simba").addHandler(failures)
    common: dict[str, Any] = {"api_base": job.api_base, "api_key": "x", "cache": False,
                              "num_retries": 0}  # fmt: skip
    actor = dspy.LM(f"openai/{job.model}", temperature=job.temperature,
                    max_tokens=job.max_tokens, **common)  # fmt: skip
    writer = dspy.LM(f"openai/{job.writer}", temperature=1.0, max_tokens=job.critic_tokens,
                     **common)  # fmt: skip
    dspy.configure(lm=actor, adapter=Plain())

    def metric(example: Any, prediction: Any) -> Any:
        reward, feedback = job.grade(example.task_id, prediction.answer)
        return dspy.Prediction(score=reward, feedback=feedback) if job.critic else reward

    tasks = job.train
    trainset = [
        dspy.Example(
            question=t["prompt"],
            task_id=t["task_id"],
            **({"answer": t["reference"]} if job.tell else {}),
        ).with_inputs("question")
        for t in tasks
    ]
    program = dspy.Predict(dspy.Signature("question -> answer", job.system))
    optimiser = dspy.SIMBA(
        metric=metric,
        bsize=min(BATCH, len(trainset)),
        num_candidates=CANDIDATES,
        max_steps=job.steps or steps(job, len(trainset)),
        max_demos=max_demos,
        prompt_model=writer,
        num_threads=24,
    )
    best = optimiser.compile(program, trainset=trainset, seed=job.seed)
    turns = [(str(d["question"]), str(d["answer"])) for d in best.demos]
    note = f"{failures.count} of its rule or demo steps failed" if failures.count else ""
    finish(best.signature.instructions, turns, note)


def steps(job: Job, n_tasks: int) -> int:
    """As many steps as the tokens allow, the final choice on the whole set left over."""
    rollout = 85
    step = BATCH * (2 * CANDIDATES + 1) * rollout + (CANDIDATES + 1) * 2500
    final = (CANDIDATES + 1) * n_tasks * rollout
    return max(1, min(8, (job.budget_tokens - final) // step))


if __name__ == "__main__":
    main()
