# A data person: shards of several kinds, a tokenizer of their own, two hosts' shares, a blend, and chats with tools.
set -euo pipefail
python -c '
import gzip, json
rows = [json.dumps({"text": f"{i} and {i} are {2 * i}. " * 20, "id": i}) + "\n" for i in range(80)]
open("a.jsonl", "w").writelines(rows[:30])
gzip.open("b.json.gz", "wt").writelines(rows[30:60])
open("bad.jsonl", "w").writelines([*rows[60:], "{\"text\": 5}\n", "not json\n"])
call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1, "b": 2})}}
chat = [{"role": "user", "content": "1 and 2?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3", "weight": 1}]
open("chats.jsonl", "w").writelines(json.dumps({"messages": chat}) + "\n" for _ in range(20))'
megalite tokenizer --input a.jsonl b.json.gz --vocab-size 280 --out tok --control-symbols "<|im_start|>" "<|im_end|>"
# Two shares, joined, are the bytes of one run.
megalite preprocess --input a.jsonl b.json.gz --tokenizer tok --out whole --workers 1
for i in 1 2; do megalite preprocess --input a.jsonl b.json.gz --tokenizer tok --out part$i --workers 1 --share $i/2; done
megalite preprocess --merge part1 part2 --out joined
cmp whole.bin joined.bin
cmp whole.idx joined.idx
# A bad record ends the run with its line, or is counted.
if megalite preprocess --input bad.jsonl --tokenizer tok --out bad --workers 1 2>refused.txt; then exit 1; fi
grep -q "^error: .*bad.jsonl" refused.txt
megalite preprocess --input bad.jsonl --tokenizer tok --out bad --workers 1 --skip-bad >skipped.txt
grep -q "2 bad" skipped.txt
megalite preprocess --chat --chat-template qwen2.5 --input chats.jsonl --tokenizer tok --out chats --workers 1
run="python -m pretrain_gpt --preset tiny --seq-len 64 --train-steps 2 --device cpu --split 1,0,0 --tokenizer tok"
$run --data 0.7 whole 0.3 bad --run-dir blend 2>&1 | tee blend.log
$run --data chats --seq-len 512 --loss-on answers --run-dir chat 2>&1 | tee chat.log
grep -q "answers" chat.log
# The text behind the tokens changed: said, with the file, before anything is trained.
megalite preprocess --input a.jsonl --tokenizer tok --out whole --workers 1 --overwrite
if $run --data 0.7 whole 0.3 bad --run-dir blend --train-steps 4 2>changed.txt; then exit 1; fi
grep -q "^error: .*data" changed.txt
