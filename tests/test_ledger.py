import json, shutil


def test_fixture(published):
    shutil.rmtree("/tmp/hx/P", ignore_errors=True)
    shutil.copytree(published.truth.parent, "/tmp/hx/P")
    print(published.ids)
    for d in published.ids:
        for k, r in published.records(d).items():
            print(d, k, r.metric("psnr_median").value, r.metric("psnr_median").chance)
