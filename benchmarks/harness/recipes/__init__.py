"""Implementation of benchmarks/recipes.py: templates/recipe.sh, measured.

known.py    the recipes: what each shows, its tasks and GPUs, and how the result is served
runs.py     what a run has logged, and the programs that templates call
served.py   accuracy and completions of the saved weights, behind plain vLLM
plans.py    what `--check true` plans for larger models
page.py     docs/recipes

tests/unit/benchmarks/test_recipe_pages.py covers this folder. benchmarks/recipes_chain.sh runs it in one rental.
"""
