// decode/prefill microbench against the C ABI; links nothing but the .so
#include "fastattention_cpu.h"
#include <immintrin.h>
#include <sys/mman.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>
using namespace std;
static double now(){return chrono::duration<double>(chrono::steady_clock::now().time_since_epoch()).count();}
static uint16_t f2bf(float f){uint32_t x;memcpy(&x,&f,4);return (x+0x7fff+((x>>16)&1))>>16;}
static uint16_t f2h(float f){return _cvtss_sh(f,0);}
static void*huge(size_t n){size_t A=2<<20,m=(n+A-1)/A*A+A;char*p=(char*)mmap(0,m,3,MAP_PRIVATE|MAP_ANONYMOUS,-1,0);char*q=(char*)(((uintptr_t)p+A-1)/A*A);madvise(q,m-A,MADV_HUGEPAGE);return q;}
static volatile long long sink;
__attribute__((target("avx512f"))) static void readpart(const char*p,size_t n,int pf){__m512i a=_mm512_setzero_si512(),b=a,c=a,d=a;for(const char*e=p+n;p<e;p+=256){if(pf){for(int j=0;j<4;j++)_mm_prefetch(p+pf+64*j,_MM_HINT_T0);}a=_mm512_xor_si512(a,_mm512_loadu_si512(p));b=_mm512_xor_si512(b,_mm512_loadu_si512(p+64));c=_mm512_xor_si512(c,_mm512_loadu_si512(p+128));d=_mm512_xor_si512(d,_mm512_loadu_si512(p+192));}
 sink+=_mm512_reduce_add_epi64(_mm512_xor_si512(_mm512_xor_si512(a,b),_mm512_xor_si512(c,d)));}
int main(int argc,char**argv){
  auto opt=[&](const char*k,const char*d){for(int i=1;i+1<argc;i+=2)if(string(argv[i])==k)return string(argv[i+1]);return string(d);};
  int hq=stoi(opt("-hq","8")),hk=stoi(opt("-hk","8")),D=stoi(opt("-d","128")),page=stoi(opt("-page","16")),thr=stoi(opt("-t","2")),B=stoi(opt("-b","1")),q=stoi(opt("-q","1")),rounds=stoi(opt("-r","5"));
  long S=stol(opt("-s","32768"));double gb=stod(opt("-gb","2"));string dt=opt("-dt","bf16"),isas=opt("-isa","");
  int dtype=dt=="f32"?FA_F32:dt=="f16"?FA_F16:FA_BF16;int es=dtype==FA_F32?4:2;
  fa_cpu_set_num_threads(thr,nullptr,0);
  long nb=(S+page-1)/page*B;size_t bytes=(size_t)nb*page*hk*2*D*es;int layers=q>1?1:max(1,(int)(gb*1e9/bytes+0.999));
  vector<char*> cache(layers);mt19937 r(1);normal_distribution<float> nd;
  size_t tile=1<<22;vector<char> t(tile*4+64);for(size_t i=0;i<tile;i++){float x=nd(r);if(es==4)((float*)t.data())[i]=x;else((uint16_t*)t.data())[i]=dtype==FA_F16?f2h(x):f2bf(x);}
  for(auto&c:cache){c=(char*)huge(bytes);for(size_t o=0;o<bytes;o+=(tile-1024)*es)memcpy(c+o,t.data(),min(bytes-o,(tile-1024)*es));}
  vector<int> bt(nb);for(long i=0;i<nb;i++)bt[i]=i;shuffle(bt.begin(),bt.end(),r);
  vector<int> qsl(B+1),sl(B,S);for(int i=0;i<=B;i++)qsl[i]=i*q;
  vector<char> Q((size_t)B*q*hq*D*es),O(Q.size());memcpy(Q.data(),t.data()+4096,min(Q.size(),tile*es-8192));for(size_t o=0;o<Q.size();o+=1<<20)memcpy(Q.data()+o,t.data()+4096,min((size_t)1<<20,Q.size()-o));
  fa_attention_problem p{};p.num_seqs=B;p.num_heads=hq;p.num_kv_heads=hk;p.head_size=D;p.page_size=page;p.dtype=p.kv_dtype=dtype;p.causal=1;p.window_left=p.window_right=-1;p.scale=1.f/sqrtf(D);p.key_scale=p.value_scale=1;
  p.query_start_loc=qsl.data();p.seq_lens=sl.data();p.block_table=bt.data();p.num_tokens=B*q;p.num_blocks=nb;p.block_table_width=nb/B;p.block_table_stride=nb/B;p.query=Q.data();p.out=O.data();p.query_token_stride=p.out_token_stride=hq*D;p.query_head_stride=p.out_head_stride=D;
  p.key_block_stride=p.value_block_stride=(long)hk*page*2*D;p.key_head_stride=p.value_head_stride=page*2*D;p.key_token_stride=p.value_token_stride=2*D;
  vector<string> list;string all=isas.empty()?fa_cpu_usable_isas():isas;for(size_t i=0;i<all.size();){size_t j=all.find(',',i);if(j==string::npos)j=all.size();list.push_back(all.substr(i,j-i));i=j+1;}
  auto readall=[&](char*c,int pf){vector<thread> th;size_t n=bytes/256/thr*256;for(int i=1;i<thr;i++)th.emplace_back([=]{readpart(c+i*n,n,pf);});readpart(c,n,pf);for(auto&x:th)x.join();};
  vector<vector<double>> times(list.size()+2);
  for(int k=0;k<rounds;k++){
    if(q==1)for(int pf=0;pf<2;pf++){double t0=now();for(auto c:cache)readall(c,pf?4096:0);times[pf].push_back((now()-t0)/layers);}
    for(size_t i=0;i<list.size();i++){if(fa_cpu_set_isa(list[i].c_str())){if(!k)puts(fa_cpu_last_error());times[i+2].push_back(1e9);continue;}
      double t0=now();for(auto c:cache){p.key=c;p.value=c+(size_t)D*es;if(fa_cpu_attention(&p))puts(fa_cpu_last_error());}times[i+2].push_back((now()-t0)/layers);}}
  auto med=[](vector<double> v){sort(v.begin(),v.end());return v[v.size()/2];};
  double pairs=(double)q*(S-q)+(double)q*(q+1)/2,fl=4.*D*hq*B*pairs;
  printf("%s G=%d D=%d S=%ld b=%d q=%d t=%d page=%d: ",dt.c_str(),hq/hk,D,S,B,q,thr,page);
  if(q==1){double rd=min(med(times[0]),med(times[1]));printf("read %.1f/%.1f GB/s",bytes/med(times[0])/1e9,bytes/med(times[1])/1e9);for(size_t i=0;i<list.size();i++)printf(" | %s %.1f (%.0f%%)",list[i].c_str(),bytes/med(times[i+2])/1e9,100*rd/med(times[i+2]));}
  else for(size_t i=0;i<list.size();i++)printf(" | %s %.1f ms %.3f TF",list[i].c_str(),med(times[i+2])*1e3,fl/med(times[i+2])/1e12);
  puts("");}
