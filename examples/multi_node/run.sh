#!/bin/bash
# Pretraining on the hosts of a hostfile, 8 GPUs each, over ssh; what follows goes to pretrain_gpt.py:
#   bash examples/multi_node/run.sh hostfile --data runs/data/corpus --tokenizer runs/data/tokenizer
# DRY=1 prints the ssh commands instead. INTERFACE=eth0 names the network interface where hosts have several.
set -eu
hostfile=${1:-}
[ -f "$hostfile" ] || { sed -n '2,4p' "$0" | cut -c3- >&2; exit 2; }
shift
# A failed node or link: all hosts start again, twice at most, from the last commit (--resume latest is the default).
flags=(--hostfile "$hostfile" --max-restarts 2)
if [ -n "${DRY:-}" ]; then flags+=(--print-only); fi
if [ -n "${INTERFACE:-}" ]; then
  flags+=(--env "NCCL_SOCKET_IFNAME==$INTERFACE" --env "GLOO_SOCKET_IFNAME=$INTERFACE")
fi
exec megalite launch "${flags[@]}" -- pretrain_gpt.py --preset llama-3-8b --tp 8 --save-every 500 "$@"
