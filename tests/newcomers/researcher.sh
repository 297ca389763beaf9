# A researcher: an optimizer, data and a hook of one's own, in a layout, gone on with in another.
set -eu
cat >mine.py <<'PY'
import numpy as np
import torch
from megalite.core.mesh.collectives import start_all_gather
from megalite.core.options.update_rule import RULES
from megalite.core.options.update_rule import UpdateRule
from pretrain_gpt import leaving_together, main


class Signum(UpdateRule):
    states = ("sign_momentum",)

    def update(self, share, cfg):
        grad, (momentum,) = share.scaled_grad(), share.states
        share.master.mul_(1 - share.lr * share.weight_decay)
        share.master.sub_(momentum.lerp_(grad, 1 - cfg.beta1).sign(), alpha=share.lr)
        share.round_weights()


RULES["signum"] = Signum()


class Counting:
    def __len__(self):
        return 64

    def sample(self, i):
        return (np.arange(33) + i) % 61


def norms(run, step):
    if "embed_tokens" in run.modules and step["step"] % 2 == 0:
        run.engine.optimizer.wait_weights()
        run.metrics.event("weights", step=step["step"], norm=run.modules["embed_tokens"].weight.norm().item())
    if step["step"] == 1 and "layers.0.self_attn.o_proj" in run.modules:

        def whole(module, inputs, output):
            gathered, work = start_all_gather(output.detach(), run.engine.ctx.tp)
            work.wait()
            assert gathered.shape[0] == 32, gathered.shape
            hook.remove()

        hook = run.modules["layers.0.self_attn.o_proj"].register_forward_hook(whole)


if __name__ == "__main__":
    with leaving_together():
        main(train_data=Counting(), callbacks=[norms])
PY
small="--num-layers 2 --hidden-size 32 --num-heads 2 --seq-len 32 --vocab-size 64 --device cpu --global-batch-size 4"
mine="mine.py $small --optimizer signum --lr 1e-3 --run-dir run --z-loss 1e-4"
megalite train --nproc 2 $mine --tp 2 --train-steps 4
megalite train --nproc 2 $mine --zero 3 --train-steps 6 2>&1 | tee again.log
grep -q "resumed from run/checkpoints/step_00000004 at step 4" again.log
megalite inspect run >inspect.txt
grep -q "sign_momentum" inspect.txt
python -c '
import json
lines = [json.loads(line) for line in open("run/metrics.jsonl")]
steps = [line for line in lines if "event" not in line]
assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
assert steps[-1]["loss"] < steps[0]["loss"]
assert [line["step"] for line in lines if line.get("event") == "weights"] == [2, 4, 6]'
