# A Hugging Face user: a folder of transformers and Alpaca records in, a folder of transformers out.
set -euo pipefail
python -c '
import json, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
bpe.train_from_iterator(["two and two are four, four and four are eight"] * 20,
    trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>").save_pretrained("hf")
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=bpe.get_vocab_size(), max_position_embeddings=64, **sizes)).save_pretrained("hf")
rows = [{"instruction": f"what are {i} and {i}?", "input": "", "output": f"{2 * i}"} for i in range(60)]
json.dump(rows, open("alpaca.json", "w"))'
megalite preprocess --chat --chat-template chatml --input alpaca.json --tokenizer hf --out chats --workers 1
# In the words of the Trainer: what it would take by default is said.
megalite train --nproc 2 --model_name_or_path hf --tokenizer hf --data chats --seq-len 64 --split 1,0,0 --device cpu \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --max_steps 4 --learning_rate 3e-4 --warmup_ratio 0.25 \
    --lr_scheduler_type cosine --max_grad_norm 1.0 --fsdp "full_shard auto_wrap" --output_dir run 2>&1 | tee train.log
grep -q "answers" train.log
grep -q "as in the Hugging Face Trainer" train.log
grep -q "ZeRO-3" train.log
megalite convert export --checkpoint run --out out --tokenizer hf
echo "two and two are four" >text.txt
for model in run out; do megalite evaluate $model --text text.txt --device cpu --tokenizer hf >$model.json; done
python -c '
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
one, other = (json.loads(open(f"{name}.json").read().splitlines()[-1])["loss"] for name in ("run", "out"))
assert abs(one - other) < 1e-6, (one, other)
model, info = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"]
old = AutoModelForCausalLM.from_pretrained("hf")
assert not torch.equal(model.lm_head.weight, old.lm_head.weight)
assert AutoTokenizer.from_pretrained("out").decode(AutoTokenizer.from_pretrained("out")("two")["input_ids"]) == "two"'
