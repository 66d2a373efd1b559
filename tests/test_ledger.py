import json,shutil
def test_fixture(published):
    print(published.ids, json.loads((published.out/"index.json").read_text()))
    for d in published.ids:
        for k,r in published.records(d).items():
            print(d,k,r.metric("psnr_median").value, r.metric("psnr_median").chance)
    shutil.rmtree("/tmp/hx/P",ignore_errors=True); shutil.copytree(published.truth.parent,"/tmp/hx/P")
