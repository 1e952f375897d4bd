"""The report of finished or running runs as one HTML file: reads run folders, chooses what fits, writes the page.

Nothing here imports torch. `collect` reads, `reduce` and `responses` choose, `findings`, `plan_check` and `settings`
derive, `page` writes.
"""
