# A student: text, a tokenizer, a model on two processes, its curve, its words; then on with it in another layout.
set -eu
python -c 'import pathlib, os; pathlib.Path("text.txt").write_text(pathlib.Path(os.__file__).read_text())'
megalite tokenizer --input text.txt --vocab-size 400 --out tok
megalite preprocess --input text.txt --tokenizer tok --out data --workers 1
small="--num-layers 2 --hidden-size 32 --num-heads 2 --seq-len 32 --device cpu --global-batch-size 4 --lr 3e-3 --warmup-steps 2"
megalite train --nproc 2 $small --tp 2 --data data --tokenizer tok --train-steps 12 --run-dir run
megalite train --nproc 2 $small --pp 2 --data data --tokenizer tok --train-steps 16 --run-dir run 2>&1 | tee again.log
grep -q "resumed from run/checkpoints/step_00000012 at step 12" again.log
grep -q "tp 2, continuing with\|continuing with" again.log
megalite plot run --out loss.png
megalite view run --html run.html --no-estimate
megalite inspect run --verify
megalite generate run --prompt "def " --max-new-tokens 5 --device cpu
# A typo is one line with the cure.
if megalite generate run --promt x 2>typo.log; then exit 1; fi
grep -q "did you mean --prompt" typo.log
python -c '
import json
losses = [json.loads(line)["loss"] for line in open("run/metrics.jsonl") if "\"event\"" not in line]
assert len(losses) == 16 and losses[-1] < losses[0] - 0.3, losses
assert open("loss.png", "rb").read(4) == b"\x89PNG"'
