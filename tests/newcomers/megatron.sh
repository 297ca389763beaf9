# A Megatron-LM user: the commands of a GPT tutorial as they stand there, then the same run in another layout.
set -euo pipefail
python -c '
import json
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe.train_from_iterator(["two and two are four, four and four are eight"] * 20,
    trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet))
bpe.model.save(".", "gpt2")
open("corpus.json", "w").writelines(json.dumps({"text": f"{i} and {i} are {2 * i}. " * 20}) + "\n" for i in range(60))'
megalite preprocess --input corpus.json --output-prefix my-gpt2 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
    --tokenizer-type GPT2BPETokenizer --append-eod --workers 1

GPT_ARGS="--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 4 --lr 0.00015 --train-iters 4 --lr-decay-iters 6 --lr-decay-style cosine
    --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --bf16"
DATA_ARGS="--data-path my-gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1"
OUTPUT_ARGS="--log-interval 1 --save-interval 2 --eval-interval 4 --eval-iters 1 --save checkpoints --load checkpoints"
OURS="--ignore-megatron-flags --distributed-backend gloo"
torchrun --nproc_per_node 2 -m pretrain_gpt $GPT_ARGS $DATA_ARGS $OUTPUT_ARGS $OURS --tensor-model-parallel-size 2 2>&1 | tee one.log
# Which model that is, and what was dropped, is said.
grep -q "learned" one.log
grep -q "merge-file" one.log
torchrun --nproc_per_node 2 -m pretrain_gpt $GPT_ARGS $DATA_ARGS $OUTPUT_ARGS $OURS --pipeline-model-parallel-size 2 \
    --train-iters 6 2>&1 | tee two.log
grep -q "step_00000004" two.log
python -c '
import json
steps = [json.loads(line) for line in open("checkpoints/metrics.jsonl")]
assert [line["step"] for line in steps if "grad_norm" in line] == [1, 2, 3, 4, 5, 6], steps'
# A flag that would change what is trained is refused, not dropped.
if python -m pretrain_gpt $GPT_ARGS $DATA_ARGS $OURS --squared-relu 2>refused.txt; then exit 1; fi
grep -q "^error: --squared-relu" refused.txt
