"""A GPU driver for tests: a library that says what a file says.

Each line of the file ``users`` is ``GPU pid bytes``: a process that computes there. A file ``broken`` holds the error
number that the driver answers with, a file ``hangs`` makes it answer never; ``asked`` is there once it was asked.
"""

import subprocess
import time
from pathlib import Path

SOURCE = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef struct{unsigned long long total,free,used;} mem;
typedef struct{unsigned version;unsigned long long total,kept,free,used;} mem2;
typedef struct{unsigned pid;unsigned long long used;unsigned gi,ci;} proc;
static int cp(char*d,unsigned n,const char*s){snprintf(d,n,"%s",s);return 0;}
static unsigned read_users(unsigned gpu,proc*p,unsigned room){
    FILE*f=fopen(FOLDER "/users","r");unsigned at,pid,n=0;unsigned long long used;
    if(!f)return 0;
    while(n<room&&fscanf(f,"%u %u %llu",&at,&pid,&used)==3)
        if(at==gpu){p[n].pid=pid;p[n].used=used;p[n].gi=p[n].ci=-1;n++;}
    fclose(f);return n;}
int nvmlInit_v2(void){
    int code=0;FILE*f;
    if((f=fopen(FOLDER "/asked","w")))fclose(f);
    if((f=fopen(FOLDER "/hangs","r"))){fclose(f);for(;;)pause();}
    if((f=fopen(FOLDER "/broken","r"))){if(fscanf(f,"%d",&code)!=1)code=999;fclose(f);}
    return code;}
int nvmlInitWithFlags(unsigned f){return nvmlInit_v2();}
int nvmlShutdown(void){return 0;}
int nvmlSystemGetDriverVersion(char*d,unsigned n){return cp(d,n,"580.95.05");}
int nvmlSystemGetCudaDriverVersion(int*v){*v=12080;return 0;}
int nvmlDeviceGetCount_v2(unsigned*c){*c=GPUS;return 0;}
int nvmlDeviceGetHandleByIndex_v2(unsigned i,void**h){*h=(void*)(long)(i+1);return 0;}
int nvmlDeviceGetName(void*h,char*d,unsigned n){return cp(d,n,"NVIDIA H100 80GB HBM3");}
int nvmlDeviceGetUUID(void*h,char*d,unsigned n){snprintf(d,n,"GPU-%ld",(long)h-1);return 0;}
int nvmlDeviceGetCudaComputeCapability(void*h,int*a,int*b){*a=9;*b=0;return 0;}
static unsigned long long held(void*h){
    proc p[64];unsigned long long sum=0;unsigned i,n=read_users((long)h-1,p,64);
    for(i=0;i<n;i++)sum+=p[i].used;
    return sum;}
int nvmlDeviceGetMemoryInfo(void*h,mem*m){m->total=80ull<<30;m->used=(600ull<<20)+held(h);m->free=0;return 0;}
int nvmlDeviceGetMemoryInfo_v2(void*h,mem2*m){m->total=80ull<<30;m->kept=600ull<<20;m->used=held(h);return 0;}
int nvmlDeviceGetComputeRunningProcesses_v3(void*h,unsigned*n,proc*p){*n=read_users((long)h-1,p,*n);return 0;}
"""


class Driver:
    def __init__(self, folder: Path, gpus: int = 2) -> None:
        """Set LD_LIBRARY_PATH to ``folder`` where it is to be found."""
        self.folder = folder
        source = folder / "nvml.c"
        source.write_text(f'#define FOLDER "{folder}"\n#define GPUS {gpus}\n{SOURCE}')
        library = str(folder / "libnvidia-ml.so.1")
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, str(source)], check=True)

    def users(self, *rows: tuple[int, int, int]) -> None:
        """(GPU, pid, bytes) of all who compute."""
        new = self.folder / "users.new"
        new.write_text("".join(f"{gpu} {pid} {held}\n" for gpu, pid, held in rows))
        new.rename(self.folder / "users")  # whole, whenever it is read

    def await_asked(self, within: float = 60.0) -> None:
        """Until it is asked from now on."""
        (self.folder / "asked").unlink(missing_ok=True)
        end = time.monotonic() + within
        while not (self.folder / "asked").exists():
            assert time.monotonic() < end, "nobody asked the driver"
            time.sleep(0.01)
