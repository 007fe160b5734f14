"""The dataset of prompts.

checks.py        refuse datasets that cannot be trained on, and rows that ms-swift would drop, before a model loads
encoders.py      templates that encode prompts as the engine does, and open only listed files
encoded_rows.py  refuse rows that cannot be encoded, images that cannot be trained on, and long prompts
files.py         files that ms-swift cannot read, with the line that is wrong
image_formats.py  the ways in which processors cut images, and the tokens that stand for them
evaluation_sets.py  the rows of each validation dataset, by its name
images.py        image bytes, their digests, limits on what a client may send
image_reader.py  the images of prompts as a model reads them, and their places among the tokens
streams.py       the rows that a run reads of a dataset that it streams
prompts.py       take prompts in an order that depends only on the seed
recordings.py       Recordings of rows: their files, the limits on them, and the samples that engine and trainer hear.
videos.py        Videos of rows: their files, the limits on them, and the frames that engine and trainer see.
teacher_prompts.py  a second prompt of a row, which only the teacher reads
answers.py       rows with answers for SFT, encoded once, before the model loads

Tested by tests/unit/data and tests/unit/loop/test_rollouts.py.
"""
