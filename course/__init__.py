"""The course kit: four assignments on fused linear cross-entropy and the grader for them.

Beside the library, not in it: this folder can be copied anywhere, `flce_ref` is installed as usual. What it is and how
to use it: `book/course.md`.
"""
