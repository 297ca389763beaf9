"""Files of tasks that several tests evaluate: they share a file of documents."""

from __future__ import annotations

COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {file}}}\ntest_split: test\n"
SUBJECTS = ["the sea", "tea is cheap and the ", "d", "", "is deep and the tea is cheap. the sea is deep and"]
DOCS = [{"question": s, "options": [" deep", " cheap and", " é"], "answer": i % 3} for i, s in enumerate(SUBJECTS)]
TEXT = """task: text
output_type: generate_until
doc_to_text: "and {{question}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
