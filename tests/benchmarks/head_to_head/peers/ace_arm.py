"""ace-playbook 0.3.0: reflector and curator grow a playbook task by task.

The attempt is made by the same actor as every method's (its own generator wants JSON, which this
model does not write) and handed to `ACE.step`, as its interface allows.
"""

from __future__ import annotations

from common import Job, finish


def main() -> None:
    job = Job.read()
    from ace import ACE, Feedback, OpenAILLM, Sample
    from ace.config import ACEConfig
    from ace.roles import Generation
    from openai import OpenAI

    client = OpenAI(base_url=job.api_base, api_key="x", max_retries=0, timeout=600)
    llm = OpenAILLM(
        model=job.writer, api_key="x", base_url=job.api_base, max_retries=0, timeout=600,
        json_mode=False, temperature=0.7,
    )  # fmt: skip
    ace = ACE(llm, ACEConfig(epochs=1, reflector_max_rounds=1, auto_embedder=False))
    done = 0
    for task in [*job.train, *job.choose]:
        if job.is_over():
            break
        playbook = ace.playbook.render() if len(ace.playbook) else ""
        reply = client.chat.completions.create(
            model=job.model,
            messages=[
                {"role": "system", "content": f"{job.system}\n\n{playbook}".strip()},
                {"role": "user", "content": task["prompt"]},
            ],
            temperature=job.temperature,
            max_tokens=job.max_tokens,
        )
        answer = (reply.choices[0].message.content or "").strip()
        reward, feedback = job.grade(task["task_id"], answer)
        key = task["reference"] if job.tell else None
        ace.step(
            Sample(id=task["task_id"], question=task["prompt"], answer=key),
            Feedback(correct=reward == 1.0, signal=feedback, ground_truth=key),
            phase="offline-epoch1",
            generation=Generation(answer=answer, reasoning=answer, raw=answer),
        )
        done += 1
    learnt = ace.playbook.render() if len(ace.playbook) else ""
    finish(f"{job.system}\n\n{learnt}".strip(), note=f"{done} tasks, {len(ace.playbook)} bullets")


if __name__ == "__main__":
    main()
